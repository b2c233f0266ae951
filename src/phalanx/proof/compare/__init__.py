"""Two runs side by side: what can be compared, where links part, and what steps that are done again tell."""
