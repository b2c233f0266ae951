"""PyTorch: the framework adapter, in pieces of one idea each; ``adapter.Torch`` puts them together."""
