//! The commit of a transaction: its items go to the log, and readers find what it has changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_kit::counter::count;
use offshoot_vfs::Result;
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgNumber, BasicBlock, Ino};
use zerocopy::{FromBytes, IntoBytes};

use super::{HeldBuffer, HeldContent, MissedHeaders, XfsTransaction};
use crate::buffer::{BufferRole, DiskRun, XfsBuffer};
use crate::log::{LogSequence, LoggedItem};
use crate::trans::buffer_item::{BufferChange, LoggedBuffer};
use crate::trans::inode_item::XfsLoggedInode;
use crate::trans::made::MadeCluster;
use crate::trans::{XfsInodeCommit, misused};

/// Where the superblock has the bits that [`XfsTransaction::note_attributes`] changes.
const VERSION_BITS: usize = std::mem::offset_of!(XfsSuperblockFields, versionnum);

/// What a commit has given to the log.
struct CommittedItems {
    all: Vec<Arc<dyn LoggedItem>>,
    buffers: Vec<Arc<LoggedBuffer>>,
    inodes: Vec<Arc<XfsLoggedInode>>,
    made: Vec<Arc<MadeCluster>>,
    /// What it has freed: among others the clusters of freed chunks of inodes.
    freed: Vec<DiskRun>,
}

impl XfsTransaction<'_> {
    /// Says in the superblock that the volume has attributes, when an inode is the first to have
    /// room for them. The superblock is locked last of all, for the end of a commit. Returns
    /// whether it did.
    fn note_attributes(&mut self) -> Result<bool> {
        let engine = self.engine;
        if engine.has_attributes() || self.inodes.values().all(|inode| inode.core().forkoff == 0) {
            return Ok(false);
        }
        let run = engine.superblock_run();
        self.read(run, BufferRole::Superblock)?;
        self.put(run.at, VERSION_BITS, &engine.version_with_attributes().to_bytes())?;
        Ok(true)
    }

    /// Changes the superblock, which is locked last of all.
    pub(crate) fn change_superblock(
        &mut self,
        change: impl FnOnce(&mut XfsSuperblockFields),
    ) -> Result<()> {
        let run = self.engine.superblock_run();
        let bytes = self.read(run, BufferRole::Superblock)?;
        let fields = XfsSuperblockFields::ref_from_prefix(bytes).map(|(fields, _)| *fields);
        let mut fields = fields.map_err(|_| misused("a superblock that is cut off"))?;
        change(&mut fields);
        self.change(run.at, 0..size_of::<XfsSuperblockFields>())?
            .copy_from_slice(fields.as_bytes());
        Ok(())
    }

    /// Proves all blocks of directories and of attributes that the transaction has changed.
    pub(crate) fn prove_changes(&self) -> Result<()> {
        self.prove_blocks(|_| true)
    }

    /// Proves the changed blocks that have to be proved before the commit. An edit proves its own
    /// place, and a push proves each block whole, once for all commits of a context. A mistake ends
    /// the transaction here; when the push finds it, it ends all writing. So a change that follows
    /// what a damaged volume says of itself asks for the proof of its block
    /// ([`Self::require_proof`]). Debug builds prove all blocks here, so that a mistake of ours
    /// shows where it is made.
    fn prove_for_commit(&self) -> Result<()> {
        let proves_all = self.engine.proves_all.load(Ordering::Relaxed);
        self.prove_blocks(|held| proves_all || held.needs_proof)
    }

    fn prove_blocks(&self, is_proved: impl Fn(&HeldBuffer) -> bool) -> Result<()> {
        let counters = &self.engine.shared.counters;
        self.buffers.iter().try_for_each(|(place, held)| match &held.content {
            HeldContent::Changed { bytes, .. } if is_proved(held) => {
                count(&counters.early_proofs, 1);
                held.role.verify_changed(self.geometry(), *place, bytes)
            }
            _ => Ok(()),
        })
    }

    /// Commits, and returns this commit of an inode, which the transaction has changed: no other
    /// one comes before the caller knows it. `None` when the inode is home already.
    pub(crate) fn commit_inode(mut self, ino: Ino) -> Result<Option<XfsInodeCommit>> {
        self.commit_changes(&[ino])?;
        Ok(self.engine.last_commit(ino))
    }

    pub(super) fn commit_changes(&mut self, kept: &[Ino]) -> Result<Option<LogSequence>> {
        self.prove_for_commit()?;
        let notes_attributes = self.note_attributes()?;
        let mut inodes = Vec::with_capacity(self.inodes.len());
        for (ino, inode) in &mut self.inodes {
            if kept.contains(ino) {
                inode.log_core();
            }
            if let Some(change) = inode.change(self.engine.geometry())? {
                inodes.push((inode.place(), change));
            }
        }
        let shared = &self.engine.shared;
        let most = self.buffers.len() + self.others.len() + inodes.len();
        let mut items = CommittedItems {
            all: Vec::with_capacity(most),
            buffers: Vec::with_capacity(self.buffers.len()),
            inodes: Vec::with_capacity(inodes.len()),
            made: Vec::new(),
            freed: Vec::new(),
        };
        for (place, change) in inodes {
            items.inodes.push(shared.commit_inode(place, change));
        }
        let published = self.commit_buffers(&mut items);
        items.all.append(&mut self.others);
        items.all.extend(items.inodes.iter().map(|item| item.clone() as Arc<dyn LoggedItem>));
        let sequence = if items.all.is_empty() {
            None
        } else {
            count(&shared.counters.commits, 1);
            count(&shared.counters.buffers, items.buffers.len() as u64);
            count(&shared.counters.inodes, items.inodes.len() as u64);
            Some(self.engine.log().commit(&mut self.ticket, &items.all))
        };
        if !matches!(sequence, Some(Err(_))) {
            let changed = || items.inodes.iter().map(|item| item.place.ino);
            let _gates = shared.buffers.gates(changed());
            let groups: Vec<_> = published
                .iter()
                .filter_map(|(_, buffer)| group_of_inodes(buffer.as_ref()))
                .collect();
            changed().for_each(|ino| shared.buffers.begin_publishing(ino));
            for ag in &groups {
                shared.buffers.begin_publishing_group(*ag);
            }
            // While no buffer can go home: one that is published behind that stays in memory.
            for (place, buffer) in published {
                match buffer {
                    Some(buffer) => shared.buffers.publish(buffer),
                    None => shared.buffers.forget(place),
                }
            }
            for item in &items.inodes {
                if let Some(bytes) = item.bytes() {
                    shared.buffers.publish_inode(item.place.ino, bytes);
                }
            }
            items.freed.iter().for_each(|run| shared.forget_freed_cluster(*run));
            for ag in &groups {
                shared.buffers.end_publishing_group(*ag);
            }
            changed().for_each(|ino| shared.buffers.end_publishing(ino));
        }
        items.buffers.iter().for_each(|item| item.committed());
        let context = sequence.as_ref().and_then(|sequence| sequence.as_ref().ok().copied());
        items.inodes.iter().for_each(|item| item.committed(context));
        items.made.iter().for_each(|item| item.committed());
        let sequence = sequence.transpose()?;
        if let Some(sequence) = sequence
            && !(self.freed.is_empty() && self.given_up.is_empty())
        {
            let durable = self.engine.log().durable();
            self.engine.busy.add(&self.freed, sequence, durable);
            self.engine.given_up.add(&self.given_up, sequence, durable);
        }
        if notes_attributes {
            self.engine.has_attributes.store(true, Ordering::Relaxed);
        }
        self.engine.counters.apply(&std::mem::take(&mut self.counts), &mut self.promised);
        self.engine.unlinked.apply(std::mem::take(&mut self.unlinked));
        self.freed.clear();
        self.given_up.clear();
        self.missed = MissedHeaders::default();
        self.first.clear();
        self.unlock_all_but(kept);
        Ok(sequence)
    }

    /// Gives the changed buffers to their items. Returns what readers are to find at their places.
    fn commit_buffers(
        &mut self,
        items: &mut CommittedItems,
    ) -> Vec<(BasicBlock, Option<Arc<XfsBuffer>>)> {
        let shared = &self.engine.shared;
        let mut published = Vec::with_capacity(self.buffers.len());
        for (place, held) in &mut self.buffers {
            let content = std::mem::replace(&mut held.content, HeldContent::Cancelled);
            let (change, buffer) = match content {
                HeldContent::Committed(_) => continue,
                HeldContent::Changed { bytes, dirty } => {
                    let buffer = Arc::new(XfsBuffer::changed(held.role, *place, bytes));
                    if let (true, [run]) = (held.is_made, &held.runs[..]) {
                        let made = shared.commit_made(*run);
                        items.all.push(made.clone());
                        items.made.push(made);
                    }
                    if dirty.is_empty() {
                        published.push((*place, Some(buffer)));
                        continue;
                    }
                    (BufferChange::Bytes(buffer.clone(), dirty), Some(buffer))
                }
                HeldContent::Cancelled => {
                    held.runs.iter().for_each(|run| shared.free_cluster(*run));
                    items.freed.extend_from_slice(&held.runs);
                    (BufferChange::Cancelled, None)
                }
            };
            let item = shared.commit_buffer(&held.runs, change);
            items.all.push(item.clone());
            items.buffers.push(item);
            published.push((*place, buffer));
        }
        published
    }
}

/// The group whose AGI a buffer is.
fn group_of_inodes(buffer: Option<&Arc<XfsBuffer>>) -> Option<AgNumber> {
    match buffer?.role() {
        BufferRole::Inodes(ag) => Some(ag),
        _ => None,
    }
}
