"""Optimizers and learning rate schedules beside torch's, and what is known of torch's own."""
