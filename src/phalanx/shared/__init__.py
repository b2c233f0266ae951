"""Memory that processes share, and what lies in it: the arena, its counters, its barrier. Knows no framework."""
