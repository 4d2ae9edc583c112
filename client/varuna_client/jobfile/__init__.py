"""Job files and the workdirs that go with them."""
