//! Leaves of an attribute fork: the array of hashes grows up from the header, names and local
//! values grow down from the end.
//!
//! The header lists up to three free pieces between. Kernels have written lists that overlap the
//! array (commit: fix freemap adjustments when adding xattrs to leaf blocks), so nothing here
//! relies on the list: a change counts the free pieces by the entries.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{XattrContent, XattrFlags, XfsXattr};
use crate::da::{DaEdit, DaExpected, DaInfo, DaKind, slice_at, to_u16, u16_at, view_at};
use crate::hash::name_hash;
use crate::{FileBlock, Malformed, U16, U32, XfsGeometry};

const KIND: DaKind = DaKind::AttrLeaf;

/// A free piece of a leaf. 4 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrFree {
    /// The offset in the block.
    pub base: U16,
    /// The bytes.
    pub size: U16,
}

/// The fields of a leaf behind its links and its stamp. 20 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrLeafFields {
    /// The entries.
    pub count: U16,
    /// The bytes of names and local values.
    pub usedbytes: U16,
    /// The offset of the first name. 0 stands for the end of a block of 64 KiB.
    pub firstused: U16,
    /// Whether there are free pieces that the list has not.
    pub holes: u8,
    /// Zero.
    pub pad: u8,
    /// Free pieces.
    pub freemap: [XattrFree; 3],
}

/// An entry of the array. 8 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrHash {
    /// The hash.
    pub hash: U32,
    /// The offset of the name in the block.
    pub nameidx: U16,
    /// [`XattrFlags`].
    pub flags: u8,
    /// Zero.
    pub pad: u8,
}

const _: () = {
    assert!(size_of::<XattrLeafFields>() == 20 && align_of::<XattrLeafFields>() == 1);
    assert!(size_of::<XattrHash>() == ENTRY && align_of::<XattrHash>() == 1);
};

const ENTRY: usize = 8;
const FLAGS_AT: usize = 6;
/// In front of a name with a local value: length of the value 2, of the name 1.
const LOCAL: usize = 3;
/// In front of a name with a value in blocks: first block 4, length 4, length of the name 1.
const REMOTE: usize = 9;

/// The bytes of a name and its value in a leaf. A name with a value in blocks counts two bytes
/// more than it has (seen).
fn stored_len(name_len: usize, local: Option<usize>) -> usize {
    let len = local.map_or(REMOTE + 2, |value_len| LOCAL + value_len) + name_len;
    len.next_multiple_of(4)
}

/// Whether a value is stored beside its name: together they need less than three quarters of a
/// block.
#[must_use]
pub fn is_local(geometry: &XfsGeometry, name: &[u8], value: &[u8]) -> bool {
    let size = geometry.block_size();
    stored_len(name.len(), Some(value.len())) < size / 2 + size / 4
}

/// The bytes of a leaf that attributes may take.
#[must_use]
pub fn capacity(geometry: &XfsGeometry) -> usize {
    geometry.block_size().saturating_sub(KIND.header_len(geometry))
}

/// The bytes that an attribute takes of the [`capacity`] of a leaf.
#[must_use]
pub fn taken(xattr: &XfsXattr<'_>) -> usize {
    let local = match xattr.value {
        XattrContent::Local(value) => Some(value.len()),
        XattrContent::Remote { .. } => None,
    };
    ENTRY + stored_len(xattr.name.len(), local)
}

/// A verified leaf.
#[derive(Clone, Copy, Debug)]
pub struct XattrLeaf<'a> {
    /// The links to the neighbours.
    pub info: &'a DaInfo,
    /// The array, ascending by hash.
    pub hashes: &'a [XattrHash],
    block: &'a [u8],
}

impl<'a> XattrLeaf<'a> {
    /// Proves that a block is the expected leaf, and all its names.
    pub fn parse(
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        KIND.check(geometry, block, expected)?;
        let leaf = Self::view(geometry, block)?;
        let fields: &XattrLeafFields = view_at(KIND, block, KIND.fields_at(geometry))?;
        let first = match usize::from(fields.firstused.get()) {
            0 if block.len() > usize::from(u16::MAX) => block.len(),
            first => first,
        };
        let end = KIND.header_len(geometry) + leaf.hashes.len() * ENTRY;
        if first < end || first > block.len() {
            return Err(KIND.bad(format!("its first name is at {first}")));
        }
        if !leaf.hashes.is_sorted_by_key(|entry| entry.hash.get()) {
            return Err(KIND.bad("its hashes do not ascend"));
        }
        for free in fields.freemap {
            let (base, size) = (usize::from(free.base.get()), usize::from(free.size.get()));
            if base + size > block.len() || base % 4 != 0 || size % 4 != 0 {
                return Err(KIND.bad(format!("a free piece of {size} bytes at {base}")));
            }
        }
        for entry in leaf.hashes {
            let (xattr, _) = stored(block, *entry)?;
            if usize::from(entry.nameidx.get()) < first || xattr.hash()? != entry.hash.get() {
                return Err(KIND.bad(format!("the name at {} has another hash", entry.nameidx)));
            }
        }
        Ok(leaf)
    }

    /// Views a leaf that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, block: &'a [u8]) -> Result<Self, Malformed> {
        let fields: &XattrLeafFields = view_at(KIND, block, KIND.fields_at(geometry))?;
        let count = usize::from(fields.count.get());
        let hashes = slice_at(KIND, block, KIND.header_len(geometry), count)?;
        Ok(Self { info: view_at(KIND, block, 0)?, hashes, block })
    }

    /// Proves what the header says about space: how many bytes names and values take, and that none
    /// of them lies in a free piece or over another. A free piece over the array is no problem, as
    /// kernels have written such.
    pub fn check_space(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let fields: &XattrLeafFields = view_at(KIND, self.block, KIND.fields_at(geometry))?;
        let (mut used, mut ranges) = (0, Vec::with_capacity(self.hashes.len()));
        for entry in self.hashes {
            let (at, len) = (usize::from(entry.nameidx.get()), stored(self.block, *entry)?.1);
            used += len;
            ranges.push((at, at + len));
            for free in fields.freemap {
                let (base, size) = (usize::from(free.base.get()), usize::from(free.size.get()));
                if size > 0 && at < base + size && base < at + len {
                    return Err(
                        KIND.bad(format!("the name at {at} is in the free piece at {base}"))
                    );
                }
            }
        }
        ranges.sort_unstable();
        let overlap = ranges.windows(2).find_map(|pair| match pair {
            [(_, end), (at, _)] if end > at => Some(at),
            _ => None,
        });
        if let Some(at) = overlap {
            return Err(KIND.bad(format!("the name at {at} overlaps the one before it")));
        }
        if used != usize::from(fields.usedbytes.get()) {
            let counted = fields.usedbytes;
            return Err(KIND.bad(format!("{counted} bytes are counted, but names take {used}")));
        }
        Ok(())
    }

    /// The attributes from number `from` on, incomplete ones too.
    pub fn xattrs(&self, from: usize) -> impl Iterator<Item = XfsXattr<'a>> + use<'a> {
        let block = self.block;
        let hashes = self.hashes.iter().skip(from);
        hashes.filter_map(move |entry| stored(block, *entry).ok().map(|(xattr, _)| xattr))
    }

    /// The attributes with a hash, each with its number. Their names may still differ.
    pub fn with_hash(&self, hash: u32) -> impl Iterator<Item = (usize, XfsXattr<'a>)> + use<'a> {
        let start = self.hashes.partition_point(|entry| entry.hash.get() < hash);
        let (hashes, block) = (self.hashes, self.block);
        let same = (start..hashes.len()).zip(hashes.iter().skip(start));
        let same = same.take_while(move |(_, entry)| entry.hash.get() == hash);
        same.filter_map(move |(at, entry)| stored(block, *entry).ok().map(|(xattr, _)| (at, xattr)))
    }

    /// The complete attribute with a namespace and a name, and its number. Parent pointers are
    /// found by [`XattrLeaf::with_hash`].
    #[must_use]
    pub fn find(&self, namespace: XattrFlags, name: &[u8]) -> Option<(usize, XfsXattr<'a>)> {
        self.with_hash(name_hash(name)).find(|(_, xattr)| {
            xattr.is(namespace, name) && !xattr.flags.contains(XattrFlags::INCOMPLETE)
        })
    }

    /// The bytes of a leaf with these links and attributes, in any order, without a checksum. An
    /// error when they do not fit.
    pub fn encode(
        geometry: &XfsGeometry,
        expected: &DaExpected,
        (forw, back): (u32, u32),
        xattrs: &[XfsXattr<'_>],
    ) -> Result<Vec<u8>, Malformed> {
        let mut block = KIND.empty(geometry, expected)?;
        let mut edit = DaEdit::fill(KIND, &mut block);
        edit.put(0, U32::new(forw).as_bytes())?;
        edit.put(4, U32::new(back).as_bytes())?;
        put_fields(geometry, &mut edit)?;
        for xattr in xattrs {
            if !insert(geometry, &mut edit, xattr)? {
                return Err(KIND.bad("its attributes do not fit"));
            }
        }
        Ok(block)
    }
}

/// The attribute of an entry, and the bytes that it has at its name.
fn stored(block: &[u8], entry: XattrHash) -> Result<(XfsXattr<'_>, usize), Malformed> {
    let at = usize::from(entry.nameidx.get());
    let cut = || KIND.bad(format!("the name at {at} leads out of it"));
    let flags = XattrFlags::parse(entry.flags, XattrFlags::all())?;
    let bytes = block.get(at..).filter(|_| at % 4 == 0).ok_or_else(cut)?;
    let is_local = flags.contains(XattrFlags::LOCAL);
    let name_at = if is_local { LOCAL } else { REMOTE };
    let name_len = usize::from(*bytes.get(name_at - 1).ok_or_else(cut)?);
    let name = bytes.get(name_at..name_at + name_len).ok_or_else(cut)?;
    let (value, local_len) = if is_local {
        let len = u16_at(bytes, 0).ok_or_else(cut)?;
        let value = bytes.get(name_at + name_len..name_at + name_len + len).ok_or_else(cut)?;
        (XattrContent::Local(value), Some(len))
    } else {
        let [first, len] = *view_at::<[U32; 2]>(KIND, block, at)?;
        let block = FileBlock(first.get().into());
        let len = usize::try_from(len.get()).map_err(|_| cut())?;
        (XattrContent::Remote { block, len }, None)
    };
    let xattr = XfsXattr { flags: flags - XattrFlags::LOCAL, name, value };
    xattr.check()?;
    let len = stored_len(name_len, local_len).min(bytes.len());
    Ok((xattr, len))
}

/// The bytes of an attribute at its name.
fn store(xattr: &XfsXattr<'_>) -> Result<Vec<u8>, Malformed> {
    xattr.check()?;
    let name_len = u8::try_from(xattr.name.len()).map_err(|_| KIND.bad("a long name"))?;
    let number =
        |number| u32::try_from(number).map_err(|_| KIND.bad(format!("{number} in a name")));
    let (mut bytes, value, local_len) = match xattr.value {
        XattrContent::Local(value) => {
            (to_u16(KIND, value.len())?.as_bytes().to_vec(), value, Some(value.len()))
        }
        XattrContent::Remote { block, len } => {
            let fields = [U32::new(number(block.0)?), U32::new(number(len as u64)?)];
            (fields.as_bytes().to_vec(), &[][..], None)
        }
    };
    bytes.push(name_len);
    bytes.extend_from_slice(xattr.name);
    bytes.extend_from_slice(value);
    bytes.resize(stored_len(xattr.name.len(), local_len), 0);
    Ok(bytes)
}

/// The free pieces of a leaf from `start` on, ascending, and the bytes of names. An error when
/// names overlap.
fn free_pieces(
    leaf: &XattrLeaf<'_>,
    start: usize,
) -> Result<(Vec<(usize, usize)>, usize), Malformed> {
    let mut names = Vec::with_capacity(leaf.hashes.len() + 1);
    for entry in leaf.hashes {
        names.push((usize::from(entry.nameidx.get()), stored(leaf.block, *entry)?.1));
    }
    names.sort_unstable();
    names.push((leaf.block.len(), 0));
    let (mut at, mut used, mut free) = (start, 0, Vec::new());
    for (name, len) in names {
        let gap = name.checked_sub(at).ok_or_else(|| KIND.bad("two names overlap"))?;
        if gap > 0 {
            free.push((at, gap));
        }
        at = name + len;
        used += len;
    }
    Ok((free, used))
}

/// Writes the fields by the entries.
fn put_fields(geometry: &XfsGeometry, edit: &mut DaEdit<'_>) -> Result<(), Malformed> {
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let count = leaf.hashes.len();
    let (mut free, used) = free_pieces(&leaf, KIND.header_len(geometry) + count * ENTRY)?;
    let names = leaf.hashes.iter().map(|entry| usize::from(entry.nameidx.get()));
    let first = names.min().unwrap_or(leaf.block.len());
    free.sort_by_key(|&(_, len)| std::cmp::Reverse(len));
    let mut freemap = [XattrFree::default(); 3];
    for (place, &(base, size)) in freemap.iter_mut().zip(&free) {
        *place = XattrFree { base: to_u16(KIND, base)?, size: to_u16(KIND, size)? };
    }
    let fields = XattrLeafFields {
        count: to_u16(KIND, count)?,
        usedbytes: to_u16(KIND, used)?,
        firstused: if first == 1 << 16 { U16::ZERO } else { to_u16(KIND, first)? },
        holes: u8::from(free.len() > freemap.len()),
        pad: 0,
        freemap,
    };
    edit.put(KIND.fields_at(geometry), fields.as_bytes())
}

/// Adds an attribute to a leaf. `false` when the leaf has no room, not even when its free pieces
/// are made one. The caller has chosen by [`is_local`] where the value is.
pub fn insert(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    xattr: &XfsXattr<'_>,
) -> Result<bool, Malformed> {
    let hash = xattr.hash()?;
    let bytes = store(xattr)?;
    let array = KIND.header_len(geometry);
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let count = leaf.hashes.len();
    let place = leaf.hashes.partition_point(|entry| entry.hash.get() <= hash);
    let (free, used) = free_pieces(&leaf, array + count * ENTRY)?;
    let end = array + (count + 1) * ENTRY;
    if end + used + bytes.len() > leaf.block.len() {
        return Ok(false);
    }
    let fits = |&(at, len): &(usize, usize)| {
        let at = at + len;
        at.checked_sub(bytes.len()).filter(|&start| len >= bytes.len() && start >= end)
    };
    let has_room = free.first().is_some_and(|&(at, len)| at + len >= end && at < end);
    let best = free.iter().filter(|piece| has_room && fits(piece).is_some());
    let at = if let Some(at) = best.min_by_key(|piece| piece.1).and_then(fits) {
        at
    } else {
        compact(geometry, edit)? - bytes.len()
    };
    edit.put(at, &bytes)?;
    edit.shift(array + place * ENTRY..array + count * ENTRY, array + (place + 1) * ENTRY)?;
    let mut flags = xattr.flags;
    flags.set(XattrFlags::LOCAL, matches!(xattr.value, XattrContent::Local(_)));
    let nameidx = to_u16(KIND, at)?;
    let entry = XattrHash { hash: hash.into(), nameidx, flags: flags.bits(), pad: 0 };
    edit.put(array + place * ENTRY, entry.as_bytes())?;
    edit.put(KIND.fields_at(geometry), to_u16(KIND, count + 1)?.as_bytes())?;
    put_fields(geometry, edit)?;
    Ok(true)
}

/// Moves all names to the end. Returns where they begin.
fn compact(geometry: &XfsGeometry, edit: &mut DaEdit<'_>) -> Result<usize, Malformed> {
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let mut hashes = leaf.hashes.to_vec();
    let mut names = leaf.block.to_vec();
    let array = KIND.header_len(geometry);
    let mut at = names.len();
    for entry in &mut hashes {
        let (_, len) = stored(leaf.block, *entry)?;
        let old = usize::from(entry.nameidx.get());
        let full = || KIND.bad("its names do not fit");
        let name = leaf.block.get(old..old + len).ok_or_else(full)?;
        at = at.checked_sub(len).ok_or_else(full)?;
        names.get_mut(at..at + len).ok_or_else(full)?.copy_from_slice(name);
        entry.nameidx = to_u16(KIND, at)?;
    }
    let end = array + hashes.len() * ENTRY;
    names.get_mut(end..at).ok_or_else(|| KIND.bad("its names do not fit"))?.fill(0);
    edit.put(end, names.get(end..).unwrap_or(&[]))?;
    edit.put(array, hashes.as_bytes())?;
    Ok(at)
}

/// Removes attribute number `place` of a leaf.
pub fn remove(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    place: usize,
) -> Result<(), Malformed> {
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let count = leaf.hashes.len();
    let entry = leaf.hashes.get(place).ok_or_else(|| KIND.bad("no such attribute"))?;
    let (at, len) = (usize::from(entry.nameidx.get()), stored(leaf.block, *entry)?.1);
    let array = KIND.header_len(geometry);
    edit.put(at, &vec![0; len])?;
    edit.shift(array + (place + 1) * ENTRY..array + count * ENTRY, array + place * ENTRY)?;
    edit.put(array + (count - 1) * ENTRY, &[0; ENTRY])?;
    edit.put(KIND.fields_at(geometry), to_u16(KIND, count - 1)?.as_bytes())?;
    put_fields(geometry, edit)
}

/// Says of attribute number `place` whether it is incomplete.
pub fn set_incomplete(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    place: usize,
    is_incomplete: bool,
) -> Result<(), Malformed> {
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let entry = leaf.hashes.get(place).ok_or_else(|| KIND.bad("no such attribute"))?;
    let mut flags = XattrFlags::from_bits_retain(entry.flags);
    flags.set(XattrFlags::INCOMPLETE, is_incomplete);
    edit.put(KIND.header_len(geometry) + place * ENTRY + FLAGS_AT, &[flags.bits()])
}

/// Says where the value in blocks of attribute number `place` is.
pub fn set_remote(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    place: usize,
    block: FileBlock,
    len: usize,
) -> Result<(), Malformed> {
    let leaf = XattrLeaf::view(geometry, edit.block())?;
    let entry = leaf.hashes.get(place).ok_or_else(|| KIND.bad("no such attribute"))?;
    let (xattr, _) = stored(leaf.block, *entry)?;
    let at = usize::from(entry.nameidx.get());
    if matches!(xattr.value, XattrContent::Local(_)) {
        return Err(KIND.bad("the value is beside its name"));
    }
    let stored = store(&XfsXattr { value: XattrContent::Remote { block, len }, ..xattr })?;
    edit.put(at, stored.get(..8).unwrap_or(&[]))
}
