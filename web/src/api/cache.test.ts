import { InfiniteQueryObserver } from "@tanstack/react-query";
import { expect, it, vi } from "vitest";
import { newAnswerCache } from "./cache";

it("keeps a next page that was asked for when a change comes before it", async () => {
  const cache = newAnswerCache();
  const answers: (() => void)[] = [];
  const read = vi.fn(({ pageParam }: { pageParam: number }) => new Promise<number>((resolve) => answers.push(() => resolve(pageParam))));
  const list = new InfiniteQueryObserver(cache, { queryKey: ["list"], queryFn: read, initialPageParam: 1, getNextPageParam: (last: number) => last + 1 });
  const stop = list.subscribe(() => undefined);
  answers.shift()?.();
  await vi.waitFor(() => expect(list.getCurrentResult().data?.pages).toEqual([1]));

  const more = list.fetchNextPage();
  await vi.waitFor(() => expect(answers).toHaveLength(1));
  const change = cache.invalidateQueries({ queryKey: ["list"] });
  answers.shift()?.();
  expect((await more).data?.pages).toEqual([1, 2]);

  await vi.waitFor(() => expect(answers).toHaveLength(1)); // then both again
  answers.shift()?.();
  await vi.waitFor(() => expect(answers).toHaveLength(1));
  answers.shift()?.();
  await change;
  expect(read.mock.calls.map(([{ pageParam }]) => pageParam)).toEqual([1, 2, 1, 2]);
  stop();
});
