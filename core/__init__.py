"""Plans and what they are made from: costs, clusters, schedules, the search; without SimPy and torch.distributed."""
