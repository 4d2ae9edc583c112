"""The log files of this VM, and how much of its disk they may take."""
