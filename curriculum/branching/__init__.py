"""What makes a branch beside the call: what it takes over from its trunk, and whether it may."""
