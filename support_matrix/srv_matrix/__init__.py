"""The support matrix: records of what platforms declare, core implements and tests have shown, and tables of them."""
