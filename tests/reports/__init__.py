"""Public reports of pain in data-parallel training, each as a small program with its right value."""
