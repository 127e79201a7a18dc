"""One file for each study: its points, ratios, tables and figure, and the options of its command."""
