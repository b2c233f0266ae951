"""Several devices in one process: a copy of the model on each, one optimizer over parameters on their owners."""
