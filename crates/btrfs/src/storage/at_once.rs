//! Reads of several members at a time: a range that is on several of them, and the rows of a chunk
//! with parity.
//!
//! A lane reads into memory of its own, because it cannot borrow that of the caller. What no lane
//! has begun, the caller reads in place.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::lanes::LaneTask;
use offshoot_vfs::Result;

use super::failing::MemberCondition;
use super::read::{read_error, segment_len};
use super::ways::{MemberOffset, ReadSegment, ReadWay};
use super::{Member, Storage};

/// A range of fewer bytes is read from one member after the other: handing it to lanes would cost
/// more than it gains.
const LEAST_BYTES: usize = 128 << 10;

/// A part of a range that is contiguous on a member.
struct ReadPart {
    place: MemberOffset,
    /// Its segment.
    segment: usize,
    /// Its bytes of the buffer.
    range: Range<usize>,
}

impl ReadPart {
    fn is_next_to(&self, behind: &Self) -> bool {
        let end = self.place.physical.0.saturating_add(self.range.len() as u64);
        self.range.end <= behind.range.start
            && (self.place.member, end) == (behind.place.member, behind.place.physical.0)
    }
}

/// What a lane needs of a member to read it.
#[derive(Clone)]
struct ReadMember {
    device: Arc<dyn BlockDevice>,
    condition: Arc<MemberCondition>,
}

impl ReadMember {
    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let _under_way = self.condition.begin_read();
        let mut bytes = vec![0; len];
        self.device.read_at(offset, &mut bytes).map(|()| bytes)
    }
}

/// Parts of a range that are one request to a member.
type ReadRequest<'p> = &'p [ReadPart];

impl Storage {
    /// Reads the first way of each of `segments`, which lie one behind the other in `buf`, all
    /// members at a time. Returns which of them it has read; `None` when the range is short or on
    /// one member only, so that nothing was read.
    pub(super) fn read_at_once(
        &self,
        segments: &[ReadSegment],
        buf: &mut [u8],
    ) -> Option<Vec<bool>> {
        if segments.len() < 2 || buf.len() < LEAST_BYTES {
            return None;
        }
        let (mut parts, mut done) = (Vec::with_capacity(segments.len()), 0);
        for (segment, found) in segments.iter().enumerate() {
            let range = done..done + segment_len(found);
            done = range.end;
            if let Some(ReadWay::Direct(place)) = found.ways.first() {
                parts.push(ReadPart { place: *place, segment, range });
            }
        }
        parts.sort_by_key(|part| (part.place.member, part.place.physical.0));
        let shares: Vec<Vec<ReadRequest<'_>>> = parts
            .chunk_by(|one, next| one.place.member == next.place.member)
            .map(|own| own.chunk_by(ReadPart::is_next_to).collect())
            .collect();
        let (own, others) = shares.split_first().filter(|(_, others)| !others.is_empty())?;
        let mut is_read = vec![false; segments.len()];
        let mut note = |request: ReadRequest<'_>, read: bool| {
            for part in request {
                is_read[part.segment] = read;
            }
        };
        let tasks: Vec<_> = others.iter().map(|share| self.offer_read(share)).collect();
        for request in own {
            note(request, self.read_in_place(request, buf).is_ok());
        }
        let mut begun = Vec::with_capacity(others.len());
        for (task, share) in tasks.into_iter().zip(others) {
            if let Some(task) = task.and_then(LaneTask::begun) {
                begun.push((task, share));
                continue;
            }
            for request in share {
                note(request, self.read_in_place(request, buf).is_ok());
            }
        }
        for (task, share) in begun {
            for (request, read) in share.iter().zip(task.finish()) {
                let Ok(bytes) = read else { continue };
                let mut rest = &bytes[..];
                for part in *request {
                    let (own, behind) = rest.split_at(part.range.len());
                    buf[part.range.clone()].copy_from_slice(own);
                    rest = behind;
                }
                note(request, true);
            }
        }
        Some(is_read)
    }

    /// Offers the requests to one member to a lane.
    fn offer_read(&self, share: &[ReadRequest<'_>]) -> Option<LaneTask<Vec<io::Result<Vec<u8>>>>> {
        let member = self.read_member(share[0][0].place);
        let requests: Vec<_> = share
            .iter()
            .map(|parts| (parts[0].place.physical.0, parts.iter().map(|p| p.range.len()).sum()))
            .collect();
        self.lanes.reads.offer(move || {
            requests.into_iter().map(|(offset, len)| member.read(offset, len)).collect()
        })
    }

    /// Reads a request into its ranges of `buf`.
    fn read_in_place(&self, request: ReadRequest<'_>, buf: &mut [u8]) -> io::Result<()> {
        let (member, device) = self.present(request[0].place.member);
        let _under_way = member.condition.begin_read();
        let (mut bufs, mut rest, mut at) = (Vec::with_capacity(request.len()), buf, 0);
        for part in request {
            let (own, behind) = rest.split_at_mut(part.range.end - at);
            bufs.push(IoSliceMut::new(&mut own[part.range.start - at..]));
            (rest, at) = (behind, part.range.end);
        }
        device.read_vectored_at(request[0].place.physical.0, &mut bufs)
    }

    /// Reads `len` bytes, `offset` bytes behind each of `places`, from all their members at a time.
    ///
    /// # Errors
    /// That of the first place that cannot be read.
    pub(super) fn read_places(
        &self,
        places: &[MemberOffset],
        offset: u64,
        len: usize,
    ) -> Result<Vec<Vec<u8>>> {
        let shares: Vec<_> = places
            .iter()
            .map(|place| {
                let from = place.physical.0.saturating_add(offset);
                (self.read_member(*place), from, len)
            })
            .collect();
        let mut stripes = Vec::with_capacity(places.len());
        self.lanes.reads.run(
            &shares,
            |(member, from, len)| member.read(*from, *len),
            |place, read| {
                let (member, from, len) = &shares[place];
                stripes.push(read.map_err(|e| read_error(&*member.device, *from, *len, e)));
            },
        );
        stripes.into_iter().collect()
    }

    /// The member at `index`, which is present, and its device.
    pub(super) fn present(&self, index: usize) -> (&Member, &Arc<dyn BlockDevice>) {
        let member = self.members.get(index);
        (member, member.device.as_ref().expect("a place is on a member that is present"))
    }

    fn read_member(&self, place: MemberOffset) -> ReadMember {
        let (member, device) = self.present(place.member);
        ReadMember { device: device.clone(), condition: member.condition.clone() }
    }
}
