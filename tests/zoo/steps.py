"""Windows that many cases have: one backward, of a linear loss and whole numbers or of real ones, and a step."""

from tests.zoo.case import backward, draw, finish, real_loss, whole_loss


def whole_step(model, optimizer, rank, world, step, shape=(2, 4)):
    loss = whole_loss(model(draw(model, shape, rank, step)), world, step)
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss


def real_step(model, optimizer, rank, world, step, shape=(3, 4)):
    loss = real_loss(model(draw(model, shape, rank, step, real=True)))
    backward(optimizer, loss)
    yield "settle"
    finish(optimizer)
    return loss
