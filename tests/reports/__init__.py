"""Public reports of pain in data-parallel training, each as a small program with its right value."""

import sys

import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
