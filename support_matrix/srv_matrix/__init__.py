"""The support matrix: records of what platforms declare, core implements and tests have shown; tables made of them."""
