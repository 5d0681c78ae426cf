"""Learning-rate schedules over the whole run."""
