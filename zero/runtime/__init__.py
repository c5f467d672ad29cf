"""What happens when: from a gradient that is ready to the new weights of all ranks."""
