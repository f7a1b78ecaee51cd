"""What a search works on: costs, devices, cuts as arrays, and the oracle that scores a plan."""
