"""Planning again while training: speeds of devices, and stages that move between ranks."""
