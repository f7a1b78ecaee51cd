"""Links from measured messages: the line fitted to one pair's times, and the links that pairs share."""
