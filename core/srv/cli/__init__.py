"""The command line: `srv launch | plan | args | platforms`."""
