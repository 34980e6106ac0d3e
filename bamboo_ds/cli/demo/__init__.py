"""``bamboo demo``: a job that loses two of four workers, compared with the undisturbed one."""
