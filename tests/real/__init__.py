"""Jobs on the tools that users have: sshd, pdsh, Slurm, etcd, torchrun. `make real` runs them; `make test` does not."""
