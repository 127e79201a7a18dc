"""The vocabulary of every floor: requests, what they ask for, and the plan of an iteration."""
