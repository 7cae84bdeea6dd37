"""The cluster profiles of sbp-launch: rates declared (`local`), of data sheets, or measured."""
