"""The plan: what follows from the recipe alone, computed when asked, never carried.

Random keys (``keys``), sample orders (``orders``), which steps are audited (``audit``), and how a run is cut: into
steps and their phases (``rounds``), a batch into shares and a share into micro-batches (``shares``). How sums are added
(``fold``), what a death means (``lifecycle``), and who belongs to a run (``membership``). Pure: no framework, process,
clock or file.
"""
