"""Forms of pictures and tables, drawn from the rows of a summary. None is imported by processes that run points."""
