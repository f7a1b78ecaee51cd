"""What a simulated or measured step did: traces, their files, and two of them compared."""
