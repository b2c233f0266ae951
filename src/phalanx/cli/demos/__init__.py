"""Demonstrations: whole training jobs on real data, as ``phalanx demo NAME`` runs them."""
