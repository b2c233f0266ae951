"""What defines the answer: the fields of a recipe, its data, seeding and evaluation, and how two are told apart."""
