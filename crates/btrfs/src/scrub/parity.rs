//! Checks that parity matches the data of its row. Bad parity is not repaired, because this engine
//! does not write chunks with parity.
//!
//! Only those sectors of a row count in which some stripe has data. Elsewhere the parity may be
//! anything.

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::{Chunk, STRIPE_LEN};

use super::gather::ScrubWindow;
use super::look::{ScrubBuffer, Suspects};
use super::{ScrubFinding, ScrubOutcome, ScrubRun};

/// Checks the parity of `window`, which is whole rows of `chunk`. Skips rows with suspect data.
pub(super) fn look(
    run: &ScrubRun<'_>,
    chunk: &Chunk,
    window: &ScrubWindow,
    suspects: &Suspects,
    pages: &mut ScrubBuffer,
) {
    let width = chunk.data_stripes();
    let sector = u64::from(run.volume.superblock().sector_size);
    let sectors = usize::try_from(STRIPE_LEN / sector).expect("few");
    let unit = |at: u64| (at - chunk.start.0) / STRIPE_LEN;
    let rows = unit(window.range.start) / width..unit(window.range.end - 1) / width + 1;
    let mut pieces = window.pieces.iter().peekable();
    for row in rows {
        let own = chunk.start.0 + row * width * STRIPE_LEN;
        let end = own + width * STRIPE_LEN;
        let mut is_used = vec![false; sectors];
        while let Some(piece) = pieces.peek().filter(|piece| piece.range.start < end) {
            let (from, to) = (piece.range.start.max(own), piece.range.end.min(end));
            for at in (from..to).step_by(usize::try_from(sector).expect("small")) {
                let within = (at - chunk.start.0) % STRIPE_LEN / sector;
                is_used[usize::try_from(within).expect("in a unit")] = true;
            }
            if piece.range.end > end {
                break;
            }
            pieces.next();
        }
        let has_suspects = suspects.range(row * width..(row + 1) * width).next().is_some();
        if has_suspects || !is_used.contains(&true) || run.is_over() {
            continue;
        }
        // Missing members are reported elsewhere.
        let Some(stripes) = run.volume.storage.row(chunk, row) else { continue };
        // Unreadable data is reported as data.
        let Ok(parities) = run.volume.storage.parity_of(&stripes) else { continue };
        for parity in parities {
            let buf = pages.of(parity.bytes.len());
            let read = run.volume.storage.read_medium(parity.member, parity.physical, buf);
            let len = usize::try_from(sector).expect("small");
            let differs = |number: &usize| {
                let at = number * len..(number + 1) * len;
                is_used[*number] && buf[at.clone()] != parity.bytes[at]
            };
            let bad = match &read {
                Ok(()) => (0..sectors).filter(differs).count() as u64,
                Err(_) => is_used.iter().filter(|used| **used).count() as u64,
            };
            if bad == 0 {
                continue;
            }
            {
                let mut counts = run.counts.lock();
                match read {
                    Ok(()) => counts.parity_errors += bad,
                    Err(_) => counts.read_errors += bad,
                }
                counts.left_errors += bad;
            }
            run.found(&ScrubFinding {
                structure: "parity",
                logical: Some(Logical(own)),
                len_bytes: STRIPE_LEN,
                device: run.volume.members()[parity.member].name(),
                physical: parity.physical,
                problem: match read {
                    Ok(()) => "it is not what the data of its row adds up to".to_owned(),
                    Err(error) => error.to_string(),
                },
                outcome: ScrubOutcome::NotWritten,
                owners: Vec::new(),
            });
        }
    }
}
