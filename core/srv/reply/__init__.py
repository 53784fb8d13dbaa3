"""What a model's reply consists of besides text: reasoning and tool calls, in the format of the model."""
