//! Intents and their ends, as the log knows them.

use std::sync::Arc;

use offshoot_vfs::Result;
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::items::{
    XfsEfiExtents, XfsExchangeIntent, XfsFreeIntent, XfsIntent, XfsItemType,
};
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};

use super::work::{DeferredKind, DeferredWork, records};
use crate::log::{HomeOutcome, HomeWrites, LoggedItem, LoggedKind, LoggedSize, LoggedState};

/// An intent. It holds the tail of the log until its end is durable.
#[derive(Debug)]
pub(crate) struct LoggedIntent {
    state: LoggedState,
    /// The item.
    regions: XfsLogVector,
    /// Its end.
    end: XfsLogVector,
}

impl LoggedIntent {
    /// An intent to do `work`, all of this kind.
    pub(super) fn new(id: u64, kind: DeferredKind, work: &[DeferredWork]) -> Self {
        let (extents, counts, maps) = records(work);
        Self::of(&match kind {
            DeferredKind::Reverse => XfsLogItem::Rui(XfsIntent { id, records: &maps }),
            DeferredKind::Count => XfsLogItem::Cui(XfsIntent { id, records: &counts }),
            DeferredKind::Free => {
                XfsLogItem::Efi(XfsFreeIntent { id, extents: XfsEfiExtents::Wide(&extents) })
            }
            DeferredKind::Map => XfsLogItem::Bui(XfsIntent { id, records: &maps }),
            DeferredKind::Exchange => return Self::of_exchange(id, work),
            DeferredKind::Attribute => return Self::of_attribute(id, work),
        })
    }

    fn of_exchange(id: u64, work: &[DeferredWork]) -> Self {
        let exchange = work.iter().find_map(|work| match work {
            DeferredWork::Exchange(intent) => Some(XfsExchangeIntent { id, ..*intent }),
            _ => None,
        });
        Self::of(&XfsLogItem::Xmi(exchange.expect("work of this kind")))
    }

    fn of_attribute(id: u64, work: &[DeferredWork]) -> Self {
        let change = work.iter().find_map(|work| match work {
            DeferredWork::Attribute(change) => Some(change),
            _ => None,
        });
        let change = change.expect("work of this kind");
        Self::of(&XfsLogItem::Attri(change.intent(id)))
    }

    /// The intent that `item` is.
    pub(crate) fn of(item: &XfsLogItem<'_>) -> Self {
        let end = match item {
            XfsLogItem::Efi(intent) => Some(XfsLogItem::Efd(*intent)),
            XfsLogItem::Rui(intent) => Some(done(XfsItemType::Rud, intent.id)),
            XfsLogItem::Cui(intent) => Some(done(XfsItemType::Cud, intent.id)),
            XfsLogItem::Bui(intent) => Some(done(XfsItemType::Bud, intent.id)),
            XfsLogItem::Attri(intent) => Some(done(XfsItemType::Attrd, intent.id)),
            XfsLogItem::Xmi(intent) => Some(done(XfsItemType::Xmd, intent.id)),
            _ => None,
        };
        let encoded = |item: &XfsLogItem<'_>| {
            let mut regions = XfsLogVector::default();
            let is_kept = item.encode(&mut regions);
            debug_assert!(is_kept, "an item that we write");
            regions
        };
        let end = end.as_ref().map(encoded).unwrap_or_default();
        Self { state: LoggedState::default(), regions: encoded(item), end }
    }
}

fn done(item: XfsItemType, id: u64) -> XfsLogItem<'static> {
    XfsLogItem::Done { item, id }
}

/// The end of an intent.
#[derive(Debug)]
pub(super) struct IntentEnd {
    state: LoggedState,
    intent: Arc<LoggedIntent>,
}

impl IntentEnd {
    pub(super) fn of(intent: Arc<LoggedIntent>) -> Self {
        Self { state: LoggedState::default(), intent }
    }
}

fn size_of(regions: &XfsLogVector) -> LoggedSize {
    LoggedSize { bytes: regions.byte_count(), regions: regions.regions().len() }
}

fn copy(from: &XfsLogVector, to: &mut XfsLogVector) {
    from.regions().iter().for_each(|region| to.push(&[region]));
}

/// Both are in the log and nowhere else: there is nothing to pin, and nothing to write home.
macro_rules! in_the_log_alone {
    ($type:ty, |$item:ident| $regions:expr, |$of:ident| $kind:expr) => {
        impl LoggedItem for $type {
            fn state(&self) -> &LoggedState {
                &self.state
            }

            fn kind(&self) -> LoggedKind {
                let $of = self;
                $kind
            }

            fn size(&self) -> LoggedSize {
                let $item = self;
                size_of($regions)
            }

            fn format(&self, to: &mut XfsLogVector) {
                let $item = self;
                copy($regions, to);
            }

            fn pin(&self) {}

            fn unpin(&self, _lsn: Option<Lsn>) {}

            fn write_home(self: Arc<Self>, _home: &mut HomeWrites) -> Result<HomeOutcome> {
                Ok(HomeOutcome::Busy)
            }

            fn written(&self, _is_clean: bool) {}
        }
    };
}

in_the_log_alone!(LoggedIntent, |intent| &intent.regions, |_intent| LoggedKind::Intent);
in_the_log_alone!(IntentEnd, |end| &end.intent.end, |end| LoggedKind::Done(end.intent.clone()));
