"""Planning again while training: drift of step times, speeds of devices, and stages that move between ranks."""
