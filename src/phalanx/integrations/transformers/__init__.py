"""A job of Hugging Face's Trainer as a recipe: ``recipe(model_init, args, train_dataset, ...)``."""

from phalanx.integrations.transformers.job import recipe as recipe
