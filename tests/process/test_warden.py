import trio
