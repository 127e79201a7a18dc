"""What a format of the CPU tier changes in what a model predicts and answers."""
