"""Park and Egger's experiments, predicted: operations of a layer, splits, and whole generations."""
