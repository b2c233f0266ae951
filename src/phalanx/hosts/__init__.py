"""Several hosts in one run: torch.distributed moves bytes between them; additions are phalanx's, in the fixed order."""
