"""What to train on, and when: pure functions of the schedule, the seed and the store sizes."""
