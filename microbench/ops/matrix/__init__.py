"""Op families that multiply and add: products, convolutions, attention, LSTM layers."""
