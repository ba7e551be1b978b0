/** The answers that this tab holds, and when they are fetched again. */

import { QueryClient, type InvalidateOptions, type InvalidateQueryFilters } from "@tanstack/react-query";
import { Refused } from "./client";

/** A next page that is on its way comes before a change: fetching a list again would drop the page that was asked for. */
export class AnswerCache extends QueryClient {
  override async invalidateQueries(filters?: InvalidateQueryFilters, options?: InvalidateOptions): Promise<void> {
    const lists = this.getQueryCache().findAll({ ...filters, fetchStatus: "fetching" } as InvalidateQueryFilters);
    const more = lists.filter((query) => query.state.fetchMeta?.fetchMore);
    await Promise.allSettled(more.map((query) => query.promise));
    await super.invalidateQueries(filters, options);
  }
}

export function newAnswerCache(): AnswerCache {
  return new AnswerCache({
    defaultOptions: {
      queries: {
        staleTime: 2000,
        refetchOnWindowFocus: true,
        retry: (failures, error) => !(error instanceof Refused) && failures < 3,
      },
    },
  });
}
