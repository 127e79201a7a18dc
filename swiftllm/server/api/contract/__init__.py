"""What requests may say: bodies, their fields, and the checks across fields."""
