"""The devices of members, as DeepSpeed's accelerator has them, and the errors that say that one has failed."""
