"""What a person calls: simulate, train, resume, replay, compare and sweep."""
