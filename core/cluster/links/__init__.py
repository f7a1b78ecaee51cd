"""From measured messages to links: the line of one pair's times, and the links that pairs share."""
