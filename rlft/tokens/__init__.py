"""Between texts and tokens: chat templates as they are rendered, tokens as text."""
