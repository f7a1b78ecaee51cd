"""The explorer: a local web page on plans and schedules. Only ``panpipe explore`` imports this package."""
