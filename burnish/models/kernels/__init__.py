"""Operations that the learner and the native engine share."""
