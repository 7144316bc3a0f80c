//! Tables the capture flow shares with the injected program.
