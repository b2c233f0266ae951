"""How to choose what a recipe leaves open: replicas, workers and threads by measuring, learning rates by trying."""
