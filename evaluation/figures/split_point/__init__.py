"""Park and Egger's split search, drawn as their Fig. 14."""
